package intent

import (
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// annotations are those of Services.
var annotations = []string{
	BalanceAnnotation, ForwardingAnnotation, HelperAnnotation, LocalRedirectAnnotation,
	OutlierEjectionAnnotation, SlowStartAnnotation, SYNFilterAnnotation, WeightsAnnotation,
}

var annotationNames = strings.ReplaceAll(strings.Join(annotations, ", "), model.AnnotationPrefix, "")

// reportUnknown complains of other annotations, which are typing errors, or of another release.
func reportUnknown(svc *model.Service, complain func(field, what string)) {
	for _, name := range slices.Sorted(maps.Keys(svc.Annotations)) {
		if !slices.Contains(annotations, name) {
			complain(annotationField(name), "has no effect: this agent knows "+model.AnnotationPrefix+" with "+annotationNames)
		}
	}
}
