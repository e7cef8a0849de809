#include "tesserae/config/json.h"

namespace tesserae::config {

std::string brief(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string without_function(const Error& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return text.front() == '[' && end != std::string::npos ? text.substr(end + 2) : text;
}

}  // namespace tesserae::config
