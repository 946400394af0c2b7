"""`python -m phalanx` is the command `phalanx`."""

from phalanx.cli.main import run

if __name__ == "__main__":
    run()
