"""`python -m memq_localstack`: the command line without its script."""

import sys

from memq_localstack.command import main

sys.exit(main())
