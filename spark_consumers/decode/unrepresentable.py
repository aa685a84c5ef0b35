"""The error for an unrepresentable value, before its table is known."""


class UnrepresentableValueError(ValueError):
    """Value number `index` of a column is unrepresentable; `what` is the reason.

    `malformed`: no server writes such text, so it is damage; otherwise PostgreSQL can store the value and the
    target type cannot represent it. The caller that knows the table raises the error with its name.
    """

    def __init__(self, index: int, what: str, *, malformed: bool) -> None:
        super().__init__(what)
        self.index = index
        self.what = what
        self.malformed = malformed
