"""Make what a fresh clone lacks: both environments, and the default model.

Run as `python3 -m engine_workers.bootstrap`, with the system's Python and nothing installed. What
is there already and up to date is not touched, and takes no network and next to no time.
"""

import argparse
import sys

_OLDEST_PYTHON = (3, 11)


def main() -> int:
    """Run every step that is pending.

    Returns:
        0, or 2 after one line on stderr that says what is wrong and what to do.
    """
    if sys.version_info < _OLDEST_PYTHON:
        sys.stderr.write(
            "radixgate: python3: Python 3.11 or newer is needed, this is {}.{}; install one and "
            "run `make PYTHON=python3.11 ...`\n".format(*sys.version_info[:2])
        )
        return 2
    # Only now: an older Python could not even read these modules.
    import signal

    from cache_router.errors import RadixgateError
    from engine_workers.checkout_setup import set_up
    from engine_workers.ports import require_free

    parser = argparse.ArgumentParser(prog="engine_workers.bootstrap", description=__doc__)
    parser.add_argument("--tests", action="store_true", help="also what lint and tests need")
    parser.add_argument("--without-engine", action="store_true", help="the gateway's side only")
    parser.add_argument("--model", default="", help="what will be served; empty: the default")
    parser.add_argument("--host", default="127.0.0.1", help="where will be served")
    parser.add_argument("--port", default="", help="refused at once if it is taken; may be empty")
    options = parser.parse_args()
    # Like Ctrl-C: pip must not go on alone, since nobody would hold the lock for it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.port.isdecimal() and int(options.port) < 65536:
            # What is no port is for the command itself to refuse, with its own words.
            require_free(options.host, int(options.port), "RADIXGATE_PORT")
        set_up(
            with_tests=options.tests,
            with_engine=not options.without_engine,
            model=options.model,
        )
    except RadixgateError as error:
        sys.stderr.write(f"radixgate: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(
            f"radixgate: {error.filename or 'this checkout'}: {error.strerror or error}; this user "
            "must be able to write here, and the disk must have room\n"
        )
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nradixgate: interrupted; run the same command again to go on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
