#pragma once

#include "tesserae/os/files.h"

namespace tesserae::cli {

/// What `tesserae inspect` and `tesserae verify` do with a file instead of a folder: it is a token file
/// (docs/format.md). Return their exit statuses; throw InvalidArgument for another file, Corruption where showing one
/// finds it damaged.
int inspect_token_file(const os::Path& path, bool json);
int verify_token_file(const os::Path& path, bool quiet);

}  // namespace tesserae::cli
