"""The lock of all that is declared, loaded and registered."""

import os
import threading

# It is held for short moments, never during a build: a fork waits for it, so that the child finds everything whole.
# Nor does its holder start a program: a fork may hold the lock of `opwright.processes` while it waits for this one.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
