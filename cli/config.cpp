#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/verbs.h"
#include "tesserae/config/keys.h"
#include "tesserae/config/schema.h"
#include "tesserae/os/terminal.h"

namespace tesserae::cli {

void add_config(CLI::App& program, int& status) {
  struct Arguments {
    std::string under;
    bool markdown = false;
    bool schema = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb = program.add_subcommand("config", "Explain the keys of a configuration");
  verb->add_option("KEY", arguments->under, "Only this key, or the keys of this section");
  auto* markdown = verb->add_flag("--markdown", arguments->markdown, "Print the page docs/configuration.md");
  auto* schema = verb->add_flag("--schema", arguments->schema, "Print the JSON schema, for editors");
  markdown->excludes(schema);
  verb->callback([arguments, &status] {
    std::string text;
    if (arguments->markdown) {
      text = config::keys_as_markdown();
    } else if (arguments->schema) {
      text = config::config_schema().dump(2) + "\n";
    } else {
      text = config::keys_as_text(std::min(os::columns(os::Stream::output), 100), arguments->under);
      if (text.empty())
        throw config::ConfigError(arguments->under, "there is no such key; `tesserae config` lists them all");
    }
    std::fwrite(text.data(), 1, text.size(), stdout);
    status = 0;
  });
}

}  // namespace tesserae::cli
