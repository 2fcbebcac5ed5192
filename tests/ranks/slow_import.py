"""A module whose import does not end, for a zygote that shall end in the middle of it."""

import threading

threading.Event().wait()
