#include "tesserae/watch/page.h"

#include "tesserae/base/error.h"

namespace tesserae::watch {

std::string page_with(const std::string& nonce) {
  constexpr std::string_view mark = "@NONCE@";
  std::string made;
  std::string_view rest = page_template;
  for (size_t at; (at = rest.find(mark)) != std::string_view::npos; rest.remove_prefix(at + mark.size())) {
    made += rest.substr(0, at);
    made += nonce;
  }
  return made += rest;
}

std::string policy_with(const std::string& nonce) {
  return cat("default-src 'none'; script-src 'nonce-", nonce, "'; style-src 'nonce-", nonce,
             "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
}

}  // namespace tesserae::watch
