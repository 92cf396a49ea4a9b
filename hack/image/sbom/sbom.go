// Package sbom writes what a release consists of, as CycloneDX JSON.
package sbom

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"

	"spillway.dev/spillway/hack/image/debian"
)

// MediaType is the type of an SBOM.
const MediaType = "application/vnd.cyclonedx+json"

// stdlib is the name of Go's standard library among the modules.
const stdlib = "stdlib"

// Subject is what an SBOM describes.
type Subject struct {
	Version string
	Arch    string
	Created time.Time
	Image   bool   // a container image; else an archive of programs
	Root    string // directory of the repository, with the license of the programs
	Module  string // directory of a module that requires what the programs do
}

// Write returns the components of a subject: programs, with the Go modules that their
// build information names, and Debian packages. Components have their licenses where
// these are known.
func Write(ctx context.Context, s Subject, programs []string, packages []debian.Package) ([]byte, error) {
	var components, modules []cdx.Component
	seen := map[string]bool{}
	own, err := licensesOf(s.Root)
	if err != nil {
		return nil, err
	}
	for _, path := range programs {
		program, err := component(path, s.Version)
		if err != nil {
			return nil, err
		}
		program.Licenses = licenses(own)
		components = append(components, program)
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read modules of a program: %w", err)
		}
		library := &debug.Module{Path: stdlib, Version: strings.TrimPrefix(info.GoVersion, "go")}
		for _, m := range append([]*debug.Module{library}, info.Deps...) {
			if m = external(m); m != nil && !seen[m.Path] {
				seen[m.Path] = true
				modules = append(modules, cdx.Component{
					Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version,
					PackageURL: "pkg:golang/" + m.Path + "@" + url.QueryEscape(m.Version),
				})
			}
		}
	}
	if err := addLicenses(ctx, s.Module, modules); err != nil {
		return nil, err
	}
	components = append(components, modules...)
	for _, p := range packages {
		copyright, err := p.Copyright(ctx, packages)
		if err != nil {
			return nil, err
		}
		components = append(components, cdx.Component{
			Type: cdx.ComponentTypeLibrary, Name: p.Name, Version: p.Version,
			PackageURL: fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", p.Name, url.QueryEscape(p.Version), s.Arch),
			Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: p.SHA256}}, // of the package's file
			Licenses:   licenses(debianLicenses(copyright)),
		})
	}
	kind := cdx.ComponentTypeApplication
	if s.Image {
		kind = cdx.ComponentTypeContainer
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: s.Created.UTC().Format(time.RFC3339),
		Component: &cdx.Component{Type: kind, Name: "spillway", Version: s.Version, Description: "linux/" + s.Arch},
	}
	bom.Components = &components
	var out bytes.Buffer
	err = cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6) // which scanners read
	return out.Bytes(), err
}

// external returns the module that a dependency's code comes from, nil for a module of this
// repository.
func external(m *debug.Module) *debug.Module {
	switch {
	case m.Replace == nil:
		return m
	case strings.HasPrefix(m.Replace.Path, "."):
		return nil
	}
	return m.Replace
}

// addLicenses adds the licenses of Go modules.
func addLicenses(ctx context.Context, module string, modules []cdx.Component) error {
	var paths []string
	for _, m := range modules {
		if m.Name != stdlib {
			paths = append(paths, m.Name)
		}
	}
	found, err := moduleLicenses(ctx, module, paths)
	if err != nil {
		return err
	}
	found[stdlib] = []string{"BSD-3-Clause"} // Go's
	for i := range modules {
		modules[i].Licenses = licenses(found[modules[i].Name])
	}
	return nil
}

func component(program, version string) (cdx.Component, error) {
	data, err := os.ReadFile(program)
	if err != nil {
		return cdx.Component{}, err
	}
	sum := sha256.Sum256(data)
	return cdx.Component{
		Type: cdx.ComponentTypeApplication, Name: filepath.Base(program), Version: version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}, nil
}
