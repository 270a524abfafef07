"""One thread for numpy's matrix products, unless the user has said otherwise. Must be imported before numpy.

OpenBLAS threads spin while they wait for each other: beside other work on the same cores the proof of SmolLM2 took 80 s
with two threads and 7 s with one. Knows nothing else.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
