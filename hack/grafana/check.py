"""Decodes a dashboard with Grafana's model, encodes it, and names the fields that got lost."""

import json
import sys

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(wrote, read, at=""):
    """Yields the path of each value in wrote that read has not or has otherwise."""
    if isinstance(wrote, dict) and isinstance(read, dict):
        for key, value in wrote.items():
            if key in read:
                yield from lost(value, read[key], f"{at}.{key}")
            else:
                yield f"{at}.{key}"
    elif isinstance(wrote, list) and isinstance(read, list) and len(wrote) == len(read):
        for i, (a, b) in enumerate(zip(wrote, read)):
            yield from lost(a, b, f"{at}[{i}]")
    elif wrote != read:
        yield at


plugins.register_default_plugins()
with open(sys.argv[1], encoding="utf-8") as file:
    dashboard = json.load(file)
encoded = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
unknown = list(lost(dashboard, encoded))
for path in unknown:
    print(f"{sys.argv[1]}: Grafana's model has no {path}, or it has another value")
sys.exit(1 if unknown else 0)
