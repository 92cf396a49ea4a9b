package sbom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licensecheck"
)

// certain is the least part of a file, in percent, that must be texts of licenses.
// pkg.go.dev has the same.
const certain = 75

var licenseFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)[^/]*$`)

// moduleLicenses returns the SPDX identifiers of the licenses of modules, by their paths.
// A module without a license text that is certain is missing, and so is one that the main
// module does not need. root is the directory of the main module.
func moduleLicenses(ctx context.Context, root string, modules []string) (map[string][]string, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-e", "-mod=readonly", "-m", "-json=Path,Dir"}, modules...)...)
	cmd.Dir = root
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("find modules: %w: %s", err, strings.TrimSpace(complaint.String()))
	}
	found := map[string][]string{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var m struct{ Path, Dir string }
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			return found, nil
		} else if err != nil {
			return nil, fmt.Errorf("find modules: %w", err)
		}
		if m.Dir == "" { // a module of another program than the product's
			continue
		}
		ids, err := licensesOf(m.Dir)
		if err != nil {
			return nil, err
		}
		if len(ids) > 0 {
			found[m.Path] = ids
		}
	}
}

// licensesOf returns the sorted SPDX identifiers of the license files of a directory.
func licensesOf(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, e := range entries {
		if !e.Type().IsRegular() || !licenseFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		if c := licensecheck.Scan(text); c.Percent >= certain {
			for _, m := range c.Match {
				ids[m.ID] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(ids)), nil
}

// debianNames has SPDX identifiers of the short names of Debian's copyright files.
// https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/#license-short-name
var debianNames = map[string]string{
	"Apache-2.0": "Apache-2.0", "BSD-2-clause": "BSD-2-Clause", "BSD-3-clause": "BSD-3-Clause", "CC-BY-SA-4.0": "CC-BY-SA-4.0",
	"Expat": "MIT", "MIT/X11": "MIT", "X11": "X11", "ISC": "ISC", "zlib": "Zlib", "Beerware": "Beerware",
	"GPL-1+": "GPL-1.0-or-later", "GPL-2": "GPL-2.0-only", "GPL-2+": "GPL-2.0-or-later", "GPL-2.0+": "GPL-2.0-or-later",
	"GPL-3+":   "GPL-3.0-or-later",
	"LGPL-2.1": "LGPL-2.1-only", "LGPL-2.1+": "LGPL-2.1-or-later", "LGPL-3+": "LGPL-3.0-or-later",
}

var (
	licenseField = regexp.MustCompile(`(?m)^License: *(\S.*)$`)
	eitherOrBoth = regexp.MustCompile(` (?:and|or) `)
	commonText   = regexp.MustCompile(`/usr/share/common-licenses/([A-Za-z]+(?:-[0-9.]*[0-9])?)`)
)

// debianLicenses returns the licenses that a package's copyright file names, sorted: SPDX
// identifiers where Debian's name has one, else Debian's names. Of a file for people, these
// are the licenses whose texts it refers to.
func debianLicenses(copyright string) []string {
	names := map[string]bool{}
	if strings.HasPrefix(copyright, "Format:") {
		for _, field := range licenseField.FindAllStringSubmatch(copyright, -1) {
			for _, name := range eitherOrBoth.Split(strings.TrimSpace(field[1]), -1) {
				if id := debianNames[name]; id != "" {
					name = id
				}
				names[name] = true
			}
		}
	} else {
		for _, text := range commonText.FindAllStringSubmatch(copyright, -1) {
			names[text[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// licenses returns names of licenses in CycloneDX's form, nil for none.
func licenses(names []string) *cdx.Licenses {
	if len(names) == 0 {
		return nil
	}
	list := cdx.Licenses{}
	for _, name := range names {
		one := &cdx.License{Name: name}
		if isSPDX(name) {
			one = &cdx.License{ID: name}
		}
		list = append(list, cdx.LicenseChoice{License: one})
	}
	return &list
}

// isSPDX reports whether a name is an SPDX identifier: licensecheck has names of its own
// beside SPDX's, and CycloneDX refuses unknown identifiers.
func isSPDX(name string) bool {
	switch name {
	case "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0", "Unlicense", "0BSD":
		return true
	}
	for _, id := range debianNames {
		if id == name {
			return true
		}
	}
	return false
}
