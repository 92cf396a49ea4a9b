// Package chart packages a Helm chart, as "helm package" does, but reproducibly: the same
// files give the same archive.
package chart

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/hack/image"
)

// Media types of a chart in a registry: https://helm.sh/docs/topics/registries
const (
	configType  types.MediaType = "application/vnd.cncf.helm.config.v1+json"
	contentType types.MediaType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// Package returns the archive of the chart in a directory. Symbolic links become the
// files that they lead to.
func Package(dir string) ([]byte, error) {
	meta, err := metadata(dir)
	if err != nil {
		return nil, err
	}
	files := image.NewTree()
	err = filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(at)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, at)
		files.Write(path.Join("/", meta.Name, filepath.ToSlash(rel)), data, 0o644)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("package chart: %w", err)
	}
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	if err := files.WriteTar(zip); err != nil {
		return nil, fmt.Errorf("package chart: %w", err)
	}
	if err := zip.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Artifact returns a chart as an image of an OCI registry, which "helm pull" and "helm
// install" read. dir is the chart's directory and archive the result of Package.
func Artifact(dir string, archive []byte) (v1.Image, error) {
	meta, err := metadata(dir)
	if err != nil {
		return nil, err
	}
	return image.Artifact(image.Blob{Type: configType, Data: meta.json}, image.Blob{Type: contentType, Data: archive}, map[string]string{
		"org.opencontainers.image.title":       meta.Name,
		"org.opencontainers.image.version":     meta.Version,
		"org.opencontainers.image.description": meta.Description,
	})
}

type chartMetadata struct {
	Name        string `json:"name"`
	Version     string `json:"version"`
	Description string `json:"description"`
	json        []byte
}

func metadata(dir string) (m chartMetadata, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "Chart.yaml"))
	if err != nil {
		return m, fmt.Errorf("read chart: %w", err)
	}
	if err := yaml.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("read chart: %w", err)
	}
	m.json, err = yaml.YAMLToJSON(text)
	return m, err
}
