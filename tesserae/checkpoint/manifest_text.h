#pragma once

#include <string>
#include <string_view>

#include "tesserae/checkpoint/manifest.h"

namespace tesserae::checkpoint {

/// The text of a manifest: JSON whose last member is the checksum of everything before it, so that a changed, missing
/// or added byte anywhere is found without trusting any of them.
std::string to_text(const Manifest& manifest);

/// The inverse; `file` names it in errors. Throws Damaged: for a checksum that does not fit, for JSON that is not as
/// docs/format.md says, and for whatever defect() finds. A newer version of the format is InvalidArgument.
Manifest parse_manifest(std::string_view text, const std::string& file, Coverage coverage = Coverage::checkpoint);

/// The same without looking at the checksum: for the fuzzer, and for damage that someone wants to read around.
Manifest parse_manifest_unchecked(std::string_view text, const std::string& file, Coverage coverage);

}  // namespace tesserae::checkpoint
