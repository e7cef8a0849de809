# cmake -DSOURCE=folder -DSCRIPTS=a,b -DOUT=page_template.cpp -P embed.cmake: page.html with its style and the scripts a.js
# and b.js in it, as a string of the program: one file to serve, none to install.
file(READ ${SOURCE}/page.html html)
file(READ ${SOURCE}/page.css style)
string(REPLACE "@STYLE@" "${style}" html "${html}")
set(all "")
string(REPLACE "," ";" names "${SCRIPTS}")
foreach(name IN LISTS names)
  file(READ ${SOURCE}/${name}.js script)
  string(APPEND all "${script}\n")
endforeach()
string(REPLACE "@SCRIPT@" "${all}" html "${html}")
file(WRITE ${OUT} "#include \"tesserae/watch/page.h\"

namespace tesserae::watch {

const std::string_view page_template = R\"page(${html})page\";

}  // namespace tesserae::watch
")
