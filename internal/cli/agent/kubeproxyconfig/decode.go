// Package kubeproxyconfig reads a KubeProxyConfiguration, and knows which settings
// of kube-proxy have no effect here.
package kubeproxyconfig

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kube-proxy/config/v1alpha1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// GateExternalIPs is the feature gate for externalIPs of Services in kube-proxy. It
// is on by default since KEP-5707 introduced it (1.36), and to be off in a later version.
const GateExternalIPs = "AllowServiceExternalIPs"

// Decode reads a KubeProxyConfiguration of v1alpha1. Unknown fields, fields that are given
// twice and further documents are remarks and not errors, as with kube-proxy. An error is
// the end of a sentence that begins with the name of the file.
func Decode(text []byte) (file *v1alpha1.KubeProxyConfiguration, remarks []string, err error) {
	file, unknown, err := decode(text)
	if err != nil {
		return nil, nil, err
	}
	n, err := documents(text)
	if err != nil {
		return nil, nil, err
	}
	if n > 1 {
		remarks = append(remarks, fmt.Sprintf("the file has %d documents; only the first counts", n))
	}
	for _, what := range repeated(text) {
		remarks = append(remarks, what+"; the last one counts")
	}
	for _, u := range unknown {
		remarks = append(remarks, u+"; it is ignored")
	}
	return file, remarks, nil
}

// decode decodes the first document. unknown names fields that v1alpha1 does not have.
func decode(text []byte) (file *v1alpha1.KubeProxyConfiguration, unknown []string, err error) {
	raw, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, nil, fmt.Errorf("is not YAML: %w", err)
	}
	if bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil, nil, fmt.Errorf("is empty: write a KubeProxyConfiguration")
	}
	file = &v1alpha1.KubeProxyConfiguration{}
	strict, err := kjson.UnmarshalStrict(raw, file)
	if err != nil {
		if strings.Contains(err.Error(), "cannot unmarshal number") && strings.HasSuffix(err.Error(), "of type string") {
			err = fmt.Errorf("%w: write text there, with its unit for a duration, such as 10s", err)
		}
		return nil, nil, fmt.Errorf("cannot be decoded: %w", err)
	}
	if want := v1alpha1.SchemeGroupVersion.String(); file.APIVersion != want || file.Kind != "KubeProxyConfiguration" {
		return nil, nil, fmt.Errorf("is %q of %q: write kind KubeProxyConfiguration of %s", file.Kind, file.APIVersion, want)
	}
	for _, e := range strict {
		unknown = append(unknown, e.Error())
	}
	return file, unknown, nil
}

// repeated names the fields of the first document that are given twice, by their lines.
func repeated(text []byte) []string {
	_, err := yaml.YAMLToJSONStrict(text)
	if err == nil {
		return nil
	}
	var fields []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "line ") {
			fields = append(fields, line)
		}
	}
	return fields
}

// documents counts the documents of a YAML file that are not empty.
func documents(text []byte) (n int, err error) {
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("is not YAML: %w", err)
		}
		if raw, err := yaml.YAMLToJSON(doc); err != nil || !bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
			n++
		}
	}
}
