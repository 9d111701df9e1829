"""`python -m localstack`: the command line without its script."""

import sys

from localstack.command import main

sys.exit(main())
