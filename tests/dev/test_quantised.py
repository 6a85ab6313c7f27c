from dev.quantised.document import BOTTLENECKS, EIGHT_BIT, FLOAT32, PATH, STATES, document, keep, read
from settings import Settings


def test_the_document_shows_the_kept_rows():
    assert PATH.read_text(encoding="utf-8") == document(read())


def test_8_bit_states_end_within_two_percent_of_float32_on_average():
    rows = {(row["stage"], row["seed"], row["states"]): row["loss"] for row in read()[STATES]}
    for stage in {stage for stage, _, _ in rows}:
        seeds = [seed for at, seed, kind in rows if (at, kind) == (stage, EIGHT_BIT)]
        assert len(seeds) >= 3
        changes = [rows[stage, seed, EIGHT_BIT] / rows[stage, seed, FLOAT32] - 1 for seed in seeds]
        assert sum(changes) / len(changes) < 0.02


def test_a_learned_codebook_of_the_default_size_is_nearly_all_in_use():
    size = Settings().autoencoder.codebook_size
    [row] = [row for row in read()[BOTTLENECKS] if row["bottleneck"] == "vq" and row["codes"] == size]
    assert row["codebook_use"] > 0.9


def test_a_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "rows.json"
    for seed, kind, loss in ((1, FLOAT32, 0.5), (0, FLOAT32, 0.3), (1, FLOAT32, 0.4), (1, EIGHT_BIT, 0.2)):
        keep(STATES, {"stage": 1, "seed": seed, "states": kind, "loss": loss}, path)
    assert [row["loss"] for row in read(path)[STATES]] == [0.3, 0.2, 0.4]
