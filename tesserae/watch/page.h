#pragma once

#include <string>
#include <string_view>

namespace tesserae::watch {

/// The page: page/page.html with its style and scripts in it, joined by the build. Each `@NONCE@` in it stands for the
/// nonce of the answer that carries it.
extern const std::string_view page_template;

/// The page for one answer, and the policy that goes with it: its own style and script, this server, and nothing else.
std::string page_with(const std::string& nonce);
std::string policy_with(const std::string& nonce);

}  // namespace tesserae::watch
