package agent

import (
	"fmt"

	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/decisions/egress"
)

// parseEgressFile parses YAML or JSON.
func parseEgressFile(text []byte) (*egress.File, error) {
	var f egress.File
	if err := yaml.UnmarshalStrict(text, &f); err != nil {
		return nil, fmt.Errorf("not a file of ip-masq-agent's format: %w", err)
	}
	for i, p := range f.NonMasqueradeCIDRs {
		if !p.IsValid() {
			return nil, fmt.Errorf("nonMasqueradeCIDRs[%d]: not an address range, such as 10.0.0.0/8", i)
		}
		if p != p.Masked() {
			return nil, fmt.Errorf("nonMasqueradeCIDRs[%d]: %s has bits behind its prefix: write %s", i, p, p.Masked())
		}
	}
	return &f, nil
}
