"""Names of modules, classes and public functions are the field's terms, each with one meaning."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "runner"
# metaphors, adverbs of place, and participles that stand for what they hold
DENIED = set(
    "anew aside asked beforehand begun crew door draft fallen found gate gist glance gone "
    "hand heat held here intent kept lap look looked looking meant noted nothing odd orders "
    "outlast parcel patience put raised reach said shown somebody spelled standing story taken "
    "team tell tells thing things tidy told use used wanted whereabouts whole with within "
    "yardstick".split()
) - {"whole", "with", "within", "use", "used"}
WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def definitions() -> list[tuple[str, str, bool]]:
    """`(place, name, is a class)` of every module, class and public function."""
    rows = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT.parent).as_posix()
        rows.append((place, path.stem, False))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                rows.append((f"{place}:{node.lineno}", node.name, isinstance(node, ast.ClassDef)))
    return rows


def test_names_are_terms_of_the_field() -> None:
    denied = [
        f"{place}: {name}"
        for place, name, _ in definitions()
        if DENIED & {word.lower() for word in WORDS.findall(name)}
    ]
    assert not denied, "\n".join(denied)


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for place, name, is_class in definitions():
        if is_class:
            places[name].append(place)
    assert not {name: where for name, where in places.items() if len(where) > 1}
