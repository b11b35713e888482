"""The page says what the exports do."""

from tests.exports import matrix


def test_the_table_in_the_page_is_what_the_exports_do():
    assert matrix.stored() == matrix.table(), "run `python -m tests.exports.matrix`"
