"""The configuration with what `TUSKLINE_*` in the environment says: nested by `__`, whole sections and lists as JSON."""

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from walsender_bridge.config import Config


class FromEnvironment(BaseSettings, Config):
    """The environment before the file, whose values it is made of."""

    model_config = SettingsConfigDict(
        env_prefix="TUSKLINE_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment before the file (which arrives as init values)."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings
