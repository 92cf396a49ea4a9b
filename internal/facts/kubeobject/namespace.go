package kubeobject

import (
	"maps"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/facts/model"
)

// Namespace converts a Namespace. Its name is also a label, as in an API server.
func Namespace(o *corev1.Namespace) (*model.Namespace, []model.Problem) {
	c := newClusterChecker("Namespace", o.Name)
	c.checkName(o.Name)
	if c.invalid {
		return nil, c.problems
	}
	n := &model.Namespace{Name: o.Name, Labels: maps.Clone(o.Labels)}
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[corev1.LabelMetadataName] = o.Name
	return n, c.problems
}
