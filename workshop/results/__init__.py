"""The results of the runs, as tables and pictures."""

import logging

# Matplotlib warns where it cannot keep its cache in the user's home, which is
# no concern of someone who wants a picture.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
