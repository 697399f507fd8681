"""`python -m radixgate`: the same command, where only a Python is known."""

from radixgate.cli import main

if __name__ == "__main__":
    main()
