r"""Lines of text: UTF-8, ended by "\n" or "\r\n" and by nothing else."""

from collections.abc import Iterable, Iterator


def read_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Yield the lines of a binary stream without their ends; a byte order mark is left out.

    Bytes are split at "\n" before they are decoded: `str.splitlines` also splits at form feeds and at Unicode's own
    separators, which occur within sentences and would shift every line after them.

    Args:
        stream: An open binary file.
        name: What messages call it.

    Raises:
        ValueError: If a line is not UTF-8; the message names stream, line and byte, both counted from 1.
    """
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{name}, line {number}: text must be UTF-8, but byte {error.start + 1} of the line is 0x{byte:02x}"
            ) from None
        yield text.removesuffix("\n").removesuffix("\r")


def as_line(text: str) -> str:
    """Return the text with line ends made spaces, so that it is one line of a file."""
    return text.replace("\n", " ").replace("\r", " ")
