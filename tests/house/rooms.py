"""The import rule of a room, as a contract type for import-linter: an allow list, so that a new room starts forbidden.

Knows: which imports leave a room. Refuses to know: the table itself, which stands in pyproject.toml.
Imports inside functions and under TYPE_CHECKING count. The root package (`from tradewind import __version__`) is no room and free.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class RoomContract(Contract):
    """`room` may import, of ours, only itself and the rooms in `may_import`."""

    type_name = "room"

    room = fields.StringField()
    may_import = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collects the imports that are not allowed; changes nothing."""
        root = self.session_options["root_packages"][0]
        allowed = {str(self.room), *(str(name) for name in self.may_import)}
        broken = []
        for module in sorted(graph.modules):
            if room_of(module, root=root) != self.room:
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                target = room_of(imported, root=root)
                if target and target not in allowed:
                    details = graph.get_import_details(importer=module, imported=imported)
                    lines = ", ".join(str(detail["line_number"]) for detail in details)
                    broken.append(f"{module} imports {imported} (line {lines})")
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints one line per import that is not allowed."""
        for line in check.metadata["broken"]:
            output.print_error(line)
        output.new_line()


def room_of(module: str, *, root: str) -> str:
    """The room (first name under the root) that a module lies in; empty for the root itself and for other people's packages."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == root else ""
