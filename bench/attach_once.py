"""``python -m bench.attach_once TARGET DEFINITION``: attach, arm, and print seconds as JSON."""

import json
import sys
import time

from kprobes.open import attach


def main() -> None:
    """Measure one attach in a fresh process, as a user's is; only its imports are left out."""
    target, definition = sys.argv[1:]
    start = time.perf_counter()
    with attach(target) as session:
        attached = time.perf_counter()
        stub = session.driver.guest.stub
        session.probe(definition)
        before, stops = stub.paused_s, stub.stops
        with session.recording():
            armed = time.perf_counter()
            paused, first_stops = stub.paused_s - before, stub.stops - stops
    figures = {
        "attach": attached - start,
        "armed": armed - start,
        "paused": paused,
        "stops": first_stops,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
