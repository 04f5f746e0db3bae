{{- define "highwater.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "highwater.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "highwater.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "highwater.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "highwater.selectorLabels" -}}
app.kubernetes.io/name: {{ include "highwater.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "highwater.labels" -}}
{{ include "highwater.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The user's affinity, and on every node the label by which the GPU operator asks clients of the driver to leave: not there, or "true".
Terms are alternatives, so each of the user's is combined with each of these two. */}}
{{- define "highwater.affinity" -}}
{{- $affinity := fromYaml (toYaml (.Values.affinity | default dict)) -}}
{{- $label := (.Values.driverUpgrades | default dict).label -}}
{{- if $label -}}
{{- $ofNodes := $affinity.nodeAffinity | default dict -}}
{{- $required := $ofNodes.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- $terms := list -}}
{{- range $each := $required.nodeSelectorTerms | default (list (dict)) -}}
{{- $term := $each | default dict -}}
{{- $rules := $term.matchExpressions | default list -}}
{{- $absent := dict "key" $label "operator" "DoesNotExist" -}}
{{- $allowed := dict "key" $label "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (set (deepCopy $term) "matchExpressions" (append $rules $absent)) -}}
{{- $terms = append $terms (set (deepCopy $term) "matchExpressions" (append $rules $allowed)) -}}
{{- end -}}
{{- $node := set (deepCopy $ofNodes) "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}

{{- define "highwater.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "highwater.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "highwater.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* The port that takes annotations over TCP. */}}
{{- define "highwater.annotationsPort" -}}
{{- default .Values.listen.port .Values.annotations.port -}}
{{- end -}}

{{/* Not empty if the values make the daemon push over OTLP. */}}
{{- define "highwater.pushes" -}}
{{- with .Values.config.otlp }}{{ .endpoint }}{{ end -}}
{{- range .Values.env }}{{ if regexMatch "^(HIGHWATER_OTLP|OTEL_EXPORTER_OTLP_(METRICS_|TRACES_)?)_?ENDPOINT$" .name }}{{ .name }}{{ end }}{{ end -}}
{{- end -}}

{{/* Mebibytes of the push queue, if the daemon keeps one in memory. */}}
{{- define "highwater.queueMebibytes" -}}
{{- $otlp := .Values.config.otlp | default dict -}}
{{- if and (include "highwater.pushes" .) (not $otlp.queue_dir) -}}
{{- $most := $otlp.queue_bytes | default "64MiB" -}}
{{- if not (kindIs "string" $most) }}{{ $most = int64 $most | toString }}{{ end -}}
{{- if not (regexMatch "^[0-9]+ *([KMG]iB)?$" $most) -}}
{{- fail (printf "config.otlp.queue_bytes: %q: the chart reads whole numbers of bytes, KiB, MiB or GiB, to add them to the memory limit" $most) -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+" $most | int64 -}}
{{- if hasSuffix "GiB" $most }}{{ mul $number 1024 }}{{ else if hasSuffix "MiB" $most }}{{ $number }}
{{- else if hasSuffix "KiB" $most }}{{ div (add $number 1023) 1024 }}{{ else }}{{ div (add $number 1048575) 1048576 }}{{ end -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* The container's resources. What the push queue and the kubelet's answers take in memory comes on top of the limit, if that is in mebibytes. */}}
{{- define "highwater.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- $memory := dig "limits" "memory" "" $resources | toString -}}
{{- if regexMatch "^[0-9]+Mi$" $memory -}}
{{- $all := add (trimSuffix "Mi" $memory | int64) (include "highwater.queueMebibytes" . | int64) (ternary 24 0 .Values.kubelet.enabled) -}}
{{- $_ := set $resources.limits "memory" (printf "%dMi" $all) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Room for captures: the daemon's limit and a quarter more, because a pod that exceeds it is evicted. */}}
{{- define "highwater.capturesLimit" -}}
{{- $most := .Values.captures.mostBytes -}}
{{- $mebibytes := mul (regexFind "^[0-9]+" $most | int64) (ternary 1024 1 (hasSuffix "Gi" $most)) -}}
{{- printf "%dMi" (add1 (div (mul $mebibytes 5) 4)) -}}
{{- end -}}

{{/* The daemon's configuration file: `config`, and the path of the token. Empty if neither is set. */}}
{{- define "highwater.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.annotations.token.existingSecret -}}
{{- $config = mergeOverwrite $config (dict "annotations" (dict "token_file" "/etc/highwater/token/token")) -}}
{{- end -}}
{{- if $config -}}
{{ toYaml $config }}
{{- end -}}
{{- end -}}
