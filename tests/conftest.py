"""Threads of torch and numpy that have no work would spin, which on a busy machine took most of the time of tests that
compute much. Programs under test start their threads as users have them, but for those of torch."""

import os
import signal

# nohup and background jobs of a shell have these signals ignored, and so would the programs under test.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
is_given = "OPENBLAS_NUM_THREADS" in os.environ
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy  # noqa: E402, F401  (OpenBLAS reads the variable now)

if not is_given:
    del os.environ["OPENBLAS_NUM_THREADS"]
