"""Commands of the ``decodekit`` command line: functions of their arguments that return an exit code."""
