"""A real browser for the tests of the page: Debian's Chromium, without a window, which reaches this machine alone.

`python -m tests.browser` installs it where there is none and it can; where it cannot, it says why in a line.
"""

import json
import os
import shutil
import subprocess
from urllib.parse import urlsplit

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""Programs, and Debian's packages of them."""
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-dev-shm-usage",  # /dev/shm of a container is small
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--lang=en",
    "--window-size=1200,1500",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # without a network
)


def missing() -> list[str]:
    """The programs that are not there."""
    return [program for program in PACKAGES if shutil.which(program) is None]


def install():
    """Install what is missing; return why not, or None."""
    if not missing():
        return None
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    as_root = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    if as_root and (shutil.which("sudo") is None or subprocess.run([*as_root, "true"], check=False).returncode):
        return "this is not root, and sudo asks for a password or is not there"
    apt = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    packages = [PACKAGES[program] for program in missing()]
    for command in ([*apt, "update"], [*apt, "install", "--yes", "--no-install-recommends", *packages]):
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode or missing():
        return (result.stderr.strip().splitlines() or [f"apt-get ended with {result.returncode}"])[-1]
    return None


def start():
    """A browser that writes down what it requests. `driver.quit()` ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def hosts_requested(driver):
    """The hosts of all requests since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    return {urlsplit(url).hostname for url in urls if not url.startswith(("data:", "blob:"))}


if __name__ == "__main__" and (reason := install()):
    print(f"{' and '.join(missing())} could not be installed, so that a test will be skipped: {reason}")
