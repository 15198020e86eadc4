"""`python -m dsv4_fusions`."""

import sys

from dsv4_fusions.cli import main

sys.exit(main())
