"""The table that is pasted into a report."""

from tests.gpu.table import Row, as_table


def test_a_row_shows_both_figures_and_their_ratio():
    rows = [Row("high_res, stage 1", 2.0, 2.5), Row("a step of nothing", 0.0, 1.0)]
    assert as_table("peak in GiB", rows, "predicted") == [
        "| peak in GiB | predicted | measured | ratio |",
        "|---|---:|---:|---:|",
        "| high_res, stage 1 | 2.000 | 2.500 | 1.25 |",
        "| a step of nothing | 0.000 | 1.000 | - |",
    ]


def test_a_table_without_rows_is_not_printed():
    assert as_table("peak in GiB", [], "predicted") == []
