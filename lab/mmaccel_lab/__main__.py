"""The command `mmaccel-lab`; ``python -m mmaccel_lab`` is the same."""

from mmaccel_command import main as start


def main() -> None:
    """As `mmaccel_lab.cli.main`; one that is stopped while that is imported says so."""
    start("mmaccel_lab.cli")


if __name__ == "__main__":
    main()
