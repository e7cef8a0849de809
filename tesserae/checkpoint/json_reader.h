#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae::checkpoint {

/// Strict JSON for text that nobody vouches for. A schema of nodes takes the values while the text is read, so what is
/// kept is what the schema keeps: no tree is built, nothing recurses, and the first value that the schema does not
/// expect ends the reading. Refused besides what JSON forbids: unknown, missing and repeated keys, numbers that are no
/// integers in [0, 2^63), bad UTF-8, a byte order mark, anything behind the end.
namespace json {

/// Why and where a text was refused.
struct Malformed {
  std::string what;     ///< "files[2].bytes: expected an integer"
  uint64_t offset = 0;  ///< byte of the text
};

/// What one value may be. A node without the matching function refuses the value. Functions refuse a value by throwing
/// Refusal. Nodes outlive the reading; the same node may take many values, one after the other.
struct Node {
  std::function<void(int64_t)> integer;
  std::function<void(std::string&)> text;      ///< the string may be moved from
  std::function<void()> begin;                 ///< an object or a list starts
  std::function<Node*(std::string&)> member;   ///< the node for a key's value; makes this an object
  std::function<Node*(size_t index)> element;  ///< the node for a list's next value; makes this a list
  std::function<void()> end;                   ///< it is complete
  nlohmann::json* anything = nullptr;          ///< any value of at most `depth` levels is kept here
  int depth = 32;
};

/// Thrown by functions of a node: becomes Malformed with the place put in front.
struct Refusal {
  std::string what;
};

Node integer_into(int64_t& target);
Node text_into(std::string& target);

/// An object with exactly these keys, each once, in any order; keys with `optional` may be missing.
struct Field {
  std::string_view key;
  Node* node = nullptr;
  bool optional = false;
};
Node object_of(std::vector<Field> fields, std::function<void()> begin = {}, std::function<void()> end = {});

/// Reads `text` into `root`. Throws Malformed, also for a string of more than `longest_string` bytes: the parser holds
/// a string several times while it reads it.
void read(std::string_view text, Node& root, size_t longest_string = 1 << 20);

}  // namespace json
}  // namespace tesserae::checkpoint
