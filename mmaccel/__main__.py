"""``python -m mmaccel`` is the command line."""

from mmaccel_command import main

main()
