import re

import pytest

from docs import generate_api
from dp_operator import rules


def test_the_page_has_the_tables_of_today():
    text = generate_api.PAGE.read_text()
    assert text == generate_api.page(text), "stale: PYTHONPATH=operator python docs/generate_api.py"


def test_the_page_lists_every_field_of_the_crd(schema):
    listed = set(re.findall(r"^\| `([A-Za-z.\[\]]+)` \|", generate_api.PAGE.read_text(), flags=re.MULTILINE))
    expected = set()

    def collect(node, path):
        for name, below in node.get("properties", {}).items():
            expected.add(f"{path}{name}")
            collect(below, f"{path}{name}.")
            collect(below.get("items", {}), f"{path}{name}[].")

    collect(schema["properties"]["spec"], "")
    collect(schema["properties"]["status"], "")
    assert expected - listed == set()


def test_the_page_tells_every_refusal():
    text = generate_api.PAGE.read_text()
    for rule in rules.RULES:
        assert rule.message in text


def test_a_page_without_a_place_for_a_table_is_an_error():
    with pytest.raises(ValueError, match="places for the table spec"):
        generate_api.page("nothing")
