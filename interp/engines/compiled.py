"""placeholder"""


class CompiledSteps: ...
