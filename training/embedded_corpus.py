"""A parallel corpus that needs no download: what Unicode CLDR can say in English, German and Chinese, through Babel.

A pattern draws a value (a date, an amount, three countries) and says it in English and in the target language, in the
same style: dates, times, intervals, relative times, numbers, currencies, quantities, lists, names, and combinations of
them. Patterns are chosen so that the English line holds all that its translation needs: one source has one target.
Where CLDR's styles would give a source two, one of them is left out (English writes "May 9, 2023" in its medium and in
its long style, German does not; the English short form of "3 days" is no shorter).

CLDR's no-break and thin spaces are written as plain ones, so that lines are what a keyboard types.
"""

import functools
import random
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal

from babel import Locale
from babel.dates import format_date, format_interval, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import (
    format_compact_currency,
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    format_scientific,
    get_currency_precision,
)
from babel.units import format_compound_unit, format_unit
from datasets import Dataset, DatasetDict

LANGUAGES = {"en-de": ("en", "de"), "en-zh": ("en", "zh")}

Say = Callable[[Locale], str]  # one value, said in the language of a locale
Pattern = Callable[[random.Random], Say]  # draws a value


# Names: few enough that each occurs in many lines ------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


TERRITORIES = _words(
    """AR AT AU BD BE BR CA CH CL CN CO CU CZ DE DK EG ES ET FI FR GB GH GR HU ID IE IL IN IQ IR IS IT JP KE KR LK LT LU
    LV MA MN MT MX MY NG NL NO NP NZ PE PH PK PL PT RO RS RU SA SE SG SI SK TH TN TR TZ UA US UY VE VN ZA"""
)
TONGUES = _words(
    """ar bg bn ca cs da de el en es et eu fa fi fr ga he hi hr hu hy id is it ja ka ko la lt lv mn ms mt nb ne nl pl pt
    ro ru sk sl sq sr sv sw ta th tr uk ur vi zh"""
)
CURRENCIES = _words("AUD BRL CAD CHF CNY CZK DKK EUR GBP HUF INR JPY KRW MXN NOK NZD PLN SEK TRY USD ZAR")
SHORT_UNITS = _words(
    """area-acre area-hectare area-square-kilometer area-square-meter digital-gigabyte digital-kilobyte digital-megabyte
    duration-hour duration-minute duration-month duration-second duration-week duration-year electric-ampere
    electric-volt energy-joule energy-kilowatt-hour frequency-hertz frequency-megahertz length-centimeter length-foot
    length-inch length-kilometer length-meter length-mile length-millimeter length-yard mass-gram mass-kilogram
    mass-ounce mass-pound power-horsepower power-kilowatt power-watt speed-kilometer-per-hour speed-knot
    speed-meter-per-second speed-mile-per-hour temperature-celsius temperature-fahrenheit volume-cubic-meter
    volume-gallon volume-liter volume-milliliter"""
)
LONG_UNITS = [*SHORT_UNITS, "duration-day", "pressure-bar"]  # whose English short form can be the long one
RATES = _words(
    """digital-gigabyte digital-megabyte length-kilometer length-meter length-mile mass-gram mass-kilogram volume-liter
    volume-gallon"""
)
RATE_TIMES = _words(
    "duration-second duration-minute duration-hour duration-day duration-week duration-month duration-year"
)
COMPOUND_DURATIONS = (  # the larger unit, the smaller one, how many of these make one of those
    ("duration-year", "duration-month", 12),
    ("duration-week", "duration-day", 7),
    ("duration-day", "duration-hour", 24),
    ("duration-hour", "duration-minute", 60),
    ("duration-minute", "duration-second", 60),
)
RELATIVE_UNITS = {
    "year": timedelta(days=365),
    "week": timedelta(weeks=1),
    "day": timedelta(days=1),
    "hour": timedelta(hours=1),
    "minute": timedelta(minutes=1),
    "second": timedelta(seconds=1),
}


# Values ------------------------------------------------------------------------------------------------------------


def _day(rng: random.Random, first_year: int = 1900, last_year: int = 2099) -> date:
    start = date(first_year, 1, 1)
    return start + timedelta(days=rng.randrange((date(last_year + 1, 1, 1) - start).days))


def _clock(rng: random.Random) -> time:
    return time(rng.randrange(24), rng.randrange(60), rng.randrange(60))


def _whole(rng: random.Random, most_digits: int) -> int:
    """Draw a positive number; every number of digits is equally likely."""
    digits = rng.randint(1, most_digits)
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _decimal(rng: random.Random, most_digits: int, most_decimals: int) -> Decimal:
    decimals = rng.randint(0, most_decimals)
    fraction = rng.randrange(1, 10**decimals) if decimals else 0
    return _whole(rng, most_digits) + Decimal(fraction).scaleb(-decimals)


def _amount(rng: random.Random, places: int = 0) -> Decimal:
    """Draw an amount of money, above one: "1 Swiss franc" would be the only line with that singular."""
    return 1 + _whole(rng, most_digits=4) + Decimal(rng.randrange(10**places)).scaleb(-places)


def _large(rng: random.Random) -> Decimal:
    """Draw two or three significant digits of thousands, millions or billions: nothing is lost in the compact form."""
    return Decimal(rng.randrange(10, 1000)).scaleb(rng.choice((3, 6, 9)) - rng.choice((0, 1)))


# Patterns ----------------------------------------------------------------------------------------------------------


def _dates(skeleton: str) -> Pattern:
    """Dates with the fields that a CLDR skeleton names."""

    def pattern(rng: random.Random) -> Say:
        value = _day(rng)
        return lambda locale: format_skeleton(skeleton, value, locale=locale)

    return pattern


def _date_style(style: str, first_year: int = 1900, last_year: int = 2099) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        value = _day(rng, first_year, last_year)
        return lambda locale: format_date(value, style, locale=locale)

    return pattern


def _times(style: str) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        value = _clock(rng)
        return lambda locale: format_time(value, style, locale=locale)

    return pattern


def _date_and_time(skeleton: str) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        day, clock = _day(rng), _clock(rng)

        def say(locale: Locale) -> str:
            day_text = format_skeleton(skeleton, day, locale=locale)
            clock_text = format_time(clock, "short", locale=locale)
            return str(locale.datetime_formats["medium"]).replace("{1}", day_text).replace("{0}", clock_text)

        return say

    return pattern


def _date_intervals(skeleton: str, least_days: int, most_days: int) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        start, length = _day(rng), timedelta(days=rng.randint(least_days, most_days))
        end = start + length
        if "y" not in skeleton and end.year > start.year:  # without years it would seem to run backwards
            start, end = start - length, start
        return lambda locale: format_interval(start, end, skeleton, locale=locale)

    return pattern


def _clock_interval(rng: random.Random) -> Say:
    start, end = sorted(rng.sample(range(24 * 60), 2))
    times = [datetime(2000, 1, 1) + timedelta(minutes=minutes) for minutes in (start, end)]
    return lambda locale: format_interval(*times, "Hm", locale=locale)


def _relative(style: str, most_digits: int) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        unit = rng.choice(list(RELATIVE_UNITS))
        delta = RELATIVE_UNITS[unit] * _whole(rng, most_digits) * rng.choice((1, -1))
        return lambda locale: format_timedelta(
            delta, granularity=unit, threshold=float("inf"), add_direction=True, format=style, locale=locale
        )

    return pattern


def _compound_duration(rng: random.Random) -> Say:
    larger, smaller, limit = rng.choice(COMPOUND_DURATIONS)
    parts = ((rng.randint(1, 99), larger), (rng.randrange(1, limit), smaller))
    return lambda locale: format_list(
        [format_unit(value, unit, locale=locale) for value, unit in parts], "unit", locale=locale
    )


def _number(rng: random.Random) -> Say:
    value = _decimal(rng, most_digits=6, most_decimals=2) * rng.choice((1, 1, 1, -1))
    return lambda locale: format_decimal(value, locale=locale)


def _percentage(rng: random.Random) -> Say:
    value = _decimal(rng, most_digits=3, most_decimals=2).scaleb(-2)
    return lambda locale: format_percent(value, locale=locale, decimal_quantization=False)


def _scientific(rng: random.Random) -> Say:
    value = Decimal(rng.randrange(100, 10000)).scaleb(rng.randint(-12, 12))
    return lambda locale: format_scientific(value, locale=locale, decimal_quantization=False)


def _compact_number(style: str) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        value = _large(rng)
        return lambda locale: format_compact_decimal(value, format_type=style, locale=locale, fraction_digits=3)

    return pattern


def _compact_money(rng: random.Random) -> Say:
    currency, value = rng.choice(CURRENCIES), _large(rng)
    return lambda locale: format_compact_currency(value, currency, locale=locale, fraction_digits=3)


def _money(style: str) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        currency = rng.choice(CURRENCIES)
        value = _amount(rng, get_currency_precision(currency))
        return lambda locale: format_currency(value, currency, locale=locale, format_type=style)

    return pattern


def _whole_money(rng: random.Random) -> Say:
    currency, value = rng.choice(CURRENCIES), _amount(rng) * rng.choice((1, 1, 100))
    return lambda locale: format_currency(value, currency, locale=locale, format_type="name", currency_digits=False)


def _quantity(units: list[str], style: str) -> Pattern:
    def pattern(rng: random.Random) -> Say:
        unit, value = rng.choice(units), _decimal(rng, most_digits=4, most_decimals=1)
        return lambda locale: format_unit(value, unit, style, locale=locale)

    return pattern


def _rate(rng: random.Random) -> Say:
    unit, per, value = rng.choice(RATES), rng.choice(RATE_TIMES), _whole(rng, most_digits=3)
    return lambda locale: format_compound_unit(value, unit, denominator_unit=per, locale=locale)


def _regional_language(rng: random.Random) -> Say:
    language, territory = rng.choice(TONGUES), rng.choice(TERRITORIES)
    return lambda locale: f"{locale.languages[language]} ({locale.territories[territory]})"


def _list_of(draw: Callable[[random.Random], Sequence[Say]]) -> Pattern:
    """Lists with "and" or "or"."""

    def pattern(rng: random.Random) -> Say:
        style, items = rng.choice(("standard", "or")), draw(rng)
        return lambda locale: format_list([say(locale) for say in items], style, locale=locale)

    return pattern


def _territories(rng: random.Random) -> list[Say]:
    return [lambda locale, code=code: locale.territories[code] for code in rng.sample(TERRITORIES, rng.randint(2, 3))]


def _tongues(rng: random.Random) -> list[Say]:
    return [lambda locale, code=code: locale.languages[code] for code in rng.sample(TONGUES, rng.randint(2, 3))]


def _weekdays(rng: random.Random) -> list[Say]:
    days = sorted(rng.sample(range(7), rng.randint(2, 4)))
    return [lambda locale, day=day: locale.days["stand-alone"]["wide"][day] for day in days]


def _months(rng: random.Random) -> list[Say]:
    months = sorted(rng.sample(range(1, 13), rng.randint(2, 4)))
    return [lambda locale, month=month: locale.months["stand-alone"]["wide"][month] for month in months]


def _two_quantities(units: list[str], style: str) -> Callable[[random.Random], list[Say]]:
    def draw(rng: random.Random) -> list[Say]:
        # ones are frequent: alone, each unit would have one line in the singular
        pairs = [(rng.choice((1, 1 + _whole(rng, 2), 1 + _whole(rng, 2))), unit) for unit in rng.sample(units, 2)]
        return [
            lambda locale, value=value, unit=unit: format_unit(value, unit, style, locale=locale)
            for value, unit in pairs
        ]

    return draw


def _two_days(rng: random.Random) -> list[Say]:
    days = [date(2000, 1, 1) + timedelta(days=number) for number in sorted(rng.sample(range(366), 2))]
    return [lambda locale, day=day: format_skeleton("MMMMd", day, locale=locale) for day in days]


PATTERNS: dict[str, Pattern] = {
    "numeric date": _dates("yMd"),
    "short date": _date_style("short", 2000, 2049),  # one century: Chinese writes it out, English does not
    "medium date": _dates("yMMMd"),
    "long date": _date_style("long"),
    "full date": _date_style("full"),
    "day": _dates("MMMd"),
    "long day": _dates("MMMMd"),
    "weekday and day": _dates("MMMEd"),
    "weekday and date": _dates("yMMMEd"),
    "month": _dates("yMMM"),
    "long month": _dates("yMMMM"),
    "quarter": _dates("yQQQ"),
    "long quarter": _dates("yQQQQ"),
    "week": _dates("yw"),
    "year of the era": _dates("Gy"),
    "time": _times("short"),
    "time with seconds": _times("medium"),
    "date and time": _date_and_time("yMMMd"),
    "weekday, day and time": _date_and_time("MMMEd"),
    "interval of days": _date_intervals("MMMd", 1, 60),
    "interval of dates": _date_intervals("yMMMd", 1, 90),
    "interval of months": _date_intervals("yMMM", 31, 900),
    "interval of years": _date_intervals("y", 366, 10_000),
    "interval of times": _clock_interval,
    "relative time": _relative("long", most_digits=3),
    "short relative time": _relative("short", most_digits=2),
    "compound duration": _compound_duration,
    "number": _number,
    "percentage": _percentage,
    "scientific number": _scientific,
    "compact number": _compact_number("short"),
    "long compact number": _compact_number("long"),
    "compact currency": _compact_money,
    "currency": _money("standard"),
    "named currency": _money("name"),
    "whole named currency": _whole_money,
    "quantity": _quantity(LONG_UNITS, "long"),
    "short quantity": _quantity(SHORT_UNITS, "short"),
    "rate": _rate,
    "regional language": _regional_language,
    "territories": _list_of(_territories),
    "languages": _list_of(_tongues),
    "weekdays": _list_of(_weekdays),
    "months": _list_of(_months),
    "two quantities": _list_of(_two_quantities(LONG_UNITS, "long")),
    "two short quantities": _list_of(_two_quantities(SHORT_UNITS, "short")),
    "two days": _list_of(_two_days),
}


# The corpus --------------------------------------------------------------------------------------------------------

PLAIN_SPACES = dict.fromkeys(map(ord, "\u00a0\u2009\u202f"), " ")


def generate_pairs(
    languages: str, *, seed: int = 0, rows_per_pattern: int = 1600, held_out_rows: int = 1000
) -> DatasetDict:
    """Generate the corpus; the same arguments give the same rows in the same order in every process.

    Args:
        languages: "en-de" or "en-zh".
        seed: Seed of the values and of the split.
        rows_per_pattern: Distinct sources of each pattern; one that has few values (the days of a year) gives fewer.
        held_out_rows: Rows of validation, and of test. No source stands in two splits.

    Returns:
        Splits train, validation and test with the columns "source" and "target". No source occurs twice.

    Raises:
        ValueError: If there is no such corpus, it is too small for the held-out rows, or a source has two translations
            (the version of CLDR in use would have changed).
    """
    if languages not in LANGUAGES:
        raise ValueError(f"there is no embedded corpus {languages!r}; there are {', '.join(LANGUAGES)}")
    targets: dict[str, str] = {}
    for name in PATTERNS:
        for source, target in pattern_pairs(name, languages, seed=seed, rows=rows_per_pattern).items():
            _add(targets, source, target)
    sources = list(targets)
    if len(sources) <= 2 * held_out_rows:
        raise ValueError(f"{len(sources)} rows leave none to train on: held_out_rows is {held_out_rows}, taken twice")
    random.Random(f"split {seed}").shuffle(sources)
    parts = {
        "train": sources[2 * held_out_rows :],
        "validation": sources[:held_out_rows],
        "test": sources[held_out_rows : 2 * held_out_rows],
    }
    return DatasetDict(
        {
            split: Dataset.from_dict({"source": part, "target": [targets[source] for source in part]})
            for split, part in parts.items()
        }
    )


def pattern_pairs(name: str, languages: str, *, seed: int, rows: int) -> dict[str, str]:
    """Draw up to `rows` distinct sources of one pattern of `PATTERNS`, each with its target."""
    pattern = PATTERNS[name]
    source_locale, target_locale = map(_locale, LANGUAGES[languages])
    rng = random.Random(f"{name} {seed}")  # a string seeds the same in every process
    pairs: dict[str, str] = {}
    for _ in range(3 * rows):  # a pattern with fewer values than rows never gets there
        if len(pairs) == rows:
            break
        say = pattern(rng)
        _add(pairs, *(say(locale).translate(PLAIN_SPACES) for locale in (source_locale, target_locale)))
    return pairs


def _add(targets: dict[str, str], source: str, target: str) -> None:
    if targets.setdefault(source, target) != target:
        raise ValueError(f"{source!r} has two translations: {targets[source]!r} and {target!r}")


@functools.cache
def _locale(name: str) -> Locale:
    return Locale.parse(name)
