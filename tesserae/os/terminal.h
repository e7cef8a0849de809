#pragma once

namespace tesserae::os {

enum class Stream { output = 1, errors = 2 };

/// True if a person looks at it: a terminal that can move its cursor (TERM is not "dumb").
bool is_terminal(Stream stream);

/// How many columns the terminal has now; 80 if it is none.
int columns(Stream stream);

}  // namespace tesserae::os
