"""The job file: the user's request as TOML, checked once at the edge and resolved into a core Job. No code behind this
package sees pydantic or TOML."""

from phalanx.spec.describe import Row, explain, schema
from phalanx.spec.load import Resolved, folder_of_runs, from_mapping, load
from phalanx.spec.presets import PRESETS

__all__ = ["PRESETS", "Resolved", "Row", "explain", "folder_of_runs", "from_mapping", "load", "schema"]
