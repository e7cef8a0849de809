#include "tesserae/checkpoint/json_reader.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::checkpoint::json {
namespace {

using Json = nlohmann::json;
constexpr int64_t most_values = 100'000;  // that Node::anything may keep: what bounds its memory

/// Iterates over the text and remembers how far the parser has come, for errors.
class Cursor {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Cursor(const char* at, uint64_t* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  Cursor& operator++() {
    ++at_;
    ++*position_;
    return *this;
  }
  bool operator==(const Cursor& other) const { return at_ == other.at_; }

 private:
  const char* at_;
  uint64_t* position_;
};

/// Keeps one value of any kind, for Node::anything.
class Keeper {
 public:
  explicit Keeper(Node& node) : root_(*node.anything), depth_(static_cast<size_t>(node.depth)) {}

  bool complete() const { return started_ && open_.empty(); }

  Json* keep(Json value) {
    if (++values_ > most_values) throw Refusal{cat("more than ", most_values, " values")};
    if (!std::exchange(started_, true)) return &(root_ = std::move(value));
    Json& parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    const auto [place, fresh] = parent.emplace(std::move(key_), std::move(value));
    if (!fresh) throw Refusal{cat("key \"", place.key(), "\" occurs twice")};
    return &*place;
  }
  void open(Json container) {
    if (open_.size() >= depth_) throw Refusal{cat("more than ", depth_, " levels")};
    open_.push_back(keep(std::move(container)));
  }
  void close() { open_.pop_back(); }
  void key(std::string& key) { key_ = std::move(key); }

 private:
  Json& root_;
  size_t depth_;
  std::vector<Json*> open_;
  std::string key_;
  int64_t values_ = 0;
  bool started_ = false;
};

/// Hands the parser's events to the nodes.
class Events : public nlohmann::json_sax<Json> {
 public:
  explicit Events(Node& root) : root_(root) {}

  bool null() override { return other("null", nullptr); }
  bool boolean(bool value) override { return other(value ? "true" : "false", value); }
  bool number_integer(int64_t value) override { return other("a negative number", value); }
  bool number_float(double value, const std::string& text) override { return other(text, value); }
  bool binary(Json::binary_t&) override { throw Refusal{"binary data"}; }

  bool number_unsigned(uint64_t value) override {
    if (keeper_ || wants_anything()) return keep(value);
    Node& node = next();
    if (!node.integer) refuse(node, "an integer");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) throw Refusal{cat(value, " is too large")};
    node.integer(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (keeper_ || wants_anything()) return keep(std::move(value));
    Node& node = next();
    if (!node.text) refuse(node, "a string");
    node.text(value);
    return true;
  }

  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override { return open(false); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& key) override {
    if (keeper_) {
      keeper_->key(key);
      return true;
    }
    Frame& frame = frames_.back();
    frame.key = key.substr(0, 80);
    frame.member = frame.node->member(key);
    return true;
  }

  bool parse_error(size_t, const std::string& token, const nlohmann::detail::exception& error) override {
    // The library's text begins with its own name and a line number: what follows says what is wrong.
    const std::string text = error.what();
    const size_t begin = text.rfind(": ");
    throw Refusal{cat("no JSON: ", begin == std::string::npos ? text : text.substr(begin + 2))};
  }

  /// Where the value at hand lies: "files[2].bytes".
  std::string path() const {
    std::string path;
    for (const Frame& frame : frames_) {
      if (frame.node->member) {
        path += (path.empty() || frame.key.empty() ? "" : ".") + frame.key;
      } else if (frame.count > 0) {
        path += cat("[", frame.count - 1, "]");
      }
    }
    return path;
  }

 private:
  struct Frame {
    Node* node;
    size_t count = 0;        // values that a list has had
    std::string key = {};    // of an object's value at hand
    Node* member = nullptr;  // the node for it
  };

  /// The node that takes the value that begins now.
  Node& next() {
    if (Node* ready = std::exchange(peeked_, nullptr)) return *ready;
    Node* node = &root_;
    if (!frames_.empty()) {
      Frame& frame = frames_.back();
      node = frame.node->member ? frame.member : frame.node->element(frame.count++);
    }
    if (node == nullptr) throw Refusal{frames_.back().node->member ? "unknown key" : "too many values"};
    return *node;
  }

  bool wants_anything() {
    Node& node = next();
    peeked_ = &node;
    return node.anything != nullptr;
  }

  template <class Value>
  bool keep(Value&& value) {
    if (!keeper_) keeper_.emplace(next());
    keeper_->keep(std::forward<Value>(value));
    return settle();
  }

  bool settle() {
    if (keeper_->complete()) keeper_.reset();
    return true;
  }

  template <class Value>
  bool other(const std::string& shown, Value&& value) {
    if (keeper_ || wants_anything()) return keep(std::forward<Value>(value));
    refuse(next(), shown);
  }

  bool open(bool object) {
    if (keeper_ || wants_anything()) {
      if (!keeper_) keeper_.emplace(next());
      keeper_->open(object ? Json::object() : Json::array());
      return true;
    }
    Node& node = next();
    if (!(object ? static_cast<bool>(node.member) : static_cast<bool>(node.element))) {
      refuse(node, object ? "an object" : "a list");
    }
    if (node.begin) node.begin();
    frames_.push_back({&node});
    return true;
  }

  bool close() {
    if (keeper_) {
      keeper_->close();
      return settle();
    }
    Node* node = frames_.back().node;
    frames_.back().key.clear();
    if (node->end) node->end();
    frames_.pop_back();
    return true;
  }

  [[noreturn]] static void refuse(const Node& node, const std::string& found) {
    throw Refusal{cat("expected ",
                      node.integer   ? "an integer of 0 or more"
                      : node.text    ? "a string"
                      : node.member  ? "an object"
                      : node.element ? "a list"
                                     : "nothing",
                      ", found ", found)};
  }

  Node& root_;
  std::vector<Frame> frames_;
  Node* peeked_ = nullptr;
  std::optional<Keeper> keeper_;
};

/// Where a string begins that is longer than `limit`.
std::optional<uint64_t> find_longer_string(std::string_view text, size_t limit) {
  if (text.size() <= limit) return std::nullopt;
  for (size_t begin = text.find('"'); begin != std::string_view::npos;) {
    size_t end = begin + 1;
    while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
    if (end - begin > limit) return begin;
    begin = end < text.size() ? text.find('"', end + 1) : std::string_view::npos;
  }
  return std::nullopt;
}

}  // namespace

Node integer_into(int64_t& target) {
  Node node;
  node.integer = [&target](int64_t value) { target = value; };
  return node;
}

Node text_into(std::string& target) {
  Node node;
  node.text = [&target](std::string& value) { target = std::move(value); };
  return node;
}

Node object_of(std::vector<Field> fields, std::function<void()> begin, std::function<void()> end) {
  struct Seen {
    std::vector<Field> fields;
    std::vector<bool> seen;
  };
  auto state = std::make_shared<Seen>(Seen{std::move(fields), {}});
  Node node;
  node.begin = [state, begin = std::move(begin)] {
    state->seen.assign(state->fields.size(), false);
    if (begin) begin();
  };
  node.member = [state](std::string& key) -> Node* {
    for (size_t i = 0; i < state->fields.size(); ++i) {
      if (state->fields[i].key != key) continue;
      if (state->seen[i]) throw Refusal{"key occurs twice"};
      state->seen[i] = true;
      return state->fields[i].node;
    }
    return nullptr;
  };
  node.end = [state, end = std::move(end)] {
    for (size_t i = 0; i < state->fields.size(); ++i) {
      if (!state->seen[i] && !state->fields[i].optional)
        throw Refusal{cat("key \"", state->fields[i].key, "\" is missing")};
    }
    if (end) end();
  };
  return node;
}

void read(std::string_view text, Node& root, size_t longest_string) {
  uint64_t position = 0;
  Events events(root);
  try {
    // The parser takes a byte order mark and stops at a zero byte.
    if (text.starts_with("\xEF\xBB\xBF")) throw Refusal{"no JSON: it begins with a byte order mark"};
    if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
      position = zero;
      throw Refusal{"no JSON: it has a zero byte"};
    }
    if (const auto begin = find_longer_string(text, longest_string)) {
      position = *begin;
      throw Refusal{cat("a string of more than ", longest_string, " bytes")};
    }
    Json::sax_parse(Cursor(text.data(), &position), Cursor(text.data() + text.size(), &position), &events);
  } catch (const Refusal& refusal) {
    const std::string path = events.path();
    throw Malformed{path.empty() ? refusal.what : cat(path, ": ", refusal.what), position};
  }
}

}  // namespace tesserae::checkpoint::json
