"""A value that its column's target type cannot hold, before anybody knows whose it is."""


class UnrepresentableValueError(ValueError):
    """Value number `index` of a column does not fit; `what` says why.

    `malformed`: no server writes such text, so it is damage; otherwise it is a value that PostgreSQL
    has and the target has not. Whoever knows the table raises the named error from it.
    """

    def __init__(self, index: int, what: str, *, malformed: bool) -> None:
        super().__init__(what)
        self.index = index
        self.what = what
        self.malformed = malformed
