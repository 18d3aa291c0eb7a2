"""Runs the command line: ``python -m mmaccel``."""

from mmaccel_command import main

main()
