"""A module that exists, and imports one that does not."""

import no_such_module

factory = no_such_module.factory
