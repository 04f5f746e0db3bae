"""A job without a GPU that marks its steps: to see whether marks arrive, and where they are shown.

    PYTHONPATH=python python3 python/example.py --gpu 0
"""

import argparse
import time

import highwater


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="example")
    parser.add_argument("--gpu", default=None, help="index or UUID of the GPU whose memory is shown for it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a step takes")
    options = parser.parse_args()
    highwater.configure(job=options.job, gpu=int(options.gpu) if str(options.gpu).isdigit() else options.gpu)
    for n in range(options.steps):
        with highwater.step(n):
            with highwater.phase("data"):
                time.sleep(0.1 * options.seconds)
            with highwater.phase("forward"):
                time.sleep(0.3 * options.seconds)
            with highwater.phase("backward"):
                time.sleep(0.6 * options.seconds)


if __name__ == "__main__":
    main()
