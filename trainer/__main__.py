"""``python -m fulgurite``: the command ``fulgurite``."""

import sys

from fulgurite.cli import main

sys.exit(main())
