"""`python -m octavo`."""

import sys

from octavo.main import main

sys.exit(main())
