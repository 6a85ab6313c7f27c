from dev.recipes.presets import FINE_TUNING, ROOT, SMALL, _kinds
from settings import load_settings


def test_every_preset_trains_as_shipped_and_with_the_recipe_of_quickstart():
    quickstart = load_settings(ROOT / "configs" / "quickstart.yaml")
    kinds = _kinds(quickstart.with_overrides(SMALL), num_steps=40)
    shipped = {name: settings for names, recipe, settings in kinds if recipe == "as shipped" for name in names}
    assert set(shipped) == {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {FINE_TUNING}
    borrowed = {name: settings for names, recipe, settings in kinds if recipe != "as shipped" for name in names}
    assert set(borrowed) == set(shipped) - {"quickstart"}
    for name, settings in borrowed.items():
        preset = load_settings(ROOT / "configs" / f"{name}.yaml").ldm
        assert settings.ldm.unet == shipped[name].ldm.unet == preset.unet
        assert shipped[name].ldm.training.learning_rate == preset.training.learning_rate
        assert settings.ldm.training.learning_rate == quickstart.ldm.training.learning_rate
        assert settings.ldm.training.max_steps == shipped[name].ldm.training.max_steps == 40
