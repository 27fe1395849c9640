"""`python -m course_lib data NAME [FOLDER]`: fetch a public data set."""

import shlex
import sys

from course_lib.data import DataError, fetching

from . import folder as folders

NEXT = {
    "tiny-imagenet": "train images --data {}",
    "fashion-mnist": "train fashion-mnist --data {}",
    "cifar100": "train images --data {}",
}
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130


def run(name, folder, *, yes=False, progress=None, ask=input):
    """Tell what the set `name` is, ask, and fetch it into `folder`; the exit status.

    yes       do not ask
    progress  called as tqdm is
    """
    public = fetching.SETS[name]
    home = folder / public.path
    shown = home.parent if name == "cifar100" else home
    after = f"python -m course_lib {NEXT[name].format(shlex.quote(str(shown)))}"
    if fetching.is_there(public, folder):
        print(f"{home} is there. To train on it: {after}")
        return 0
    for file in public.files:
        print(f"{file.address}: {file.size:,} bytes, MD5 {file.md5}")
    print(f"Terms: {public.terms}.\n{public.size / 1e6:,.0f} MB, into {home}.")
    if not yes and not _agreed(ask):
        return WRONG_USAGE
    try:
        with folders.held(folder):
            fetching.fetch(public, folder, progress=progress)
    except KeyboardInterrupt:
        print("\nStopped. What has come is kept: the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    except (DataError, OSError) as error:
        print(f"python -m course_lib data {name}: {error}", file=sys.stderr)
        return FAILED
    print(f"{home} is whole. To train on it: {after}")
    return 0


def _agreed(ask):
    if not sys.stdin.isatty():
        print("Nothing is fetched: add --yes to agree.", file=sys.stderr)
        return False
    try:
        return ask("Fetch it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False
