package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"

	"spillway.dev/spillway/hack/image/debian"
)

const sbomType = "application/vnd.cyclonedx+json"

// sbom returns what an image consists of, as CycloneDX JSON: the program with its Go
// modules, which its build information names, and the Debian packages.
func sbom(r release, arch, program string, packages []debian.Package) ([]byte, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	components := []cdx.Component{{
		Type: cdx.ComponentTypeApplication, Name: "spillway", Version: r.version, BOMRef: "spillway",
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	}, {
		Type: cdx.ComponentTypeLibrary, Name: "stdlib", Version: info.GoVersion, PackageURL: "pkg:golang/stdlib@" + info.GoVersion[len("go"):],
	}}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		components = append(components, cdx.Component{
			Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version,
			PackageURL: "pkg:golang/" + m.Path + "@" + url.PathEscape(m.Version),
		})
	}
	for _, p := range packages {
		components = append(components, cdx.Component{
			Type: cdx.ComponentTypeLibrary, Name: p.Name, Version: p.Version,
			PackageURL: fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", p.Name, url.QueryEscape(p.Version), arch),
			Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: p.SHA256}}, // of the package's file
		})
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: r.created.Format(time.RFC3339),
		Component: &cdx.Component{
			Type: cdx.ComponentTypeContainer, Name: "spillway", Version: r.version,
			BOMRef: "image", Description: "linux/" + arch,
		},
	}
	bom.Components = &components
	var out bytes.Buffer
	err = cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
	return out.Bytes(), err
}
